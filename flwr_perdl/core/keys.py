"""Keys of a client's config that maths and messages have in common, and their values."""

#: The round, as Flower's own strategies call it.
ROUND = "server-round"
#: In the config that an evaluation and mods around it receive: whether a client chooses among
#: models by it, or the server asks for a report.
PURPOSE, SELECT, REPORT = "perdl.purpose", "select", "report"
