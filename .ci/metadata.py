"""Where the repository is, for the package's metadata: a hook of hatchling.

As for the site, the variable REPOSITORY_URL says it; without it the metadata have no links.
"""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Links(MetadataHookInterface):
    """Links to the repository, its issues, and the changes of this version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the links."""
        url = os.environ.get("REPOSITORY_URL", "")
        own = {"Repository": "", "Issues": "/issues"}
        own["Changelog"] = f"/blob/v{metadata['version']}/CHANGELOG.md"
        metadata["urls"] = {name: url + path for name, path in own.items()} if url else {}
