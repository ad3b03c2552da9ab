"""What the package's metadata say of the repository: a hook of hatchling.

As for the site, the variable REPOSITORY_URL says where it is. Without it the metadata have no
links, and the README's stay as they are; with it these lead to the files of this version.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Links(MetadataHookInterface):
    """Links to the repository, its issues, and the changes of this version; and the README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the links and the README."""
        url, tag = os.environ.get("REPOSITORY_URL", ""), f"v{metadata['version']}"
        own = {"Repository": "", "Issues": "/issues", "Changelog": f"/blob/{tag}/CHANGELOG.md"}
        metadata["urls"] = {name: url + path for name, path in own.items()} if url else {}
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if url:
            text = re.sub(r'((?:src|srcset)="|!\[\]\()(?!https?:)', rf"\g<1>{url}/raw/{tag}/", text)
            text = re.sub(r"(?<!!\[)\]\((?!https?:)", rf"]({url}/blob/{tag}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
