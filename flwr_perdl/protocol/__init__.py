"""What all protocols share: the driver, requests and replies, records, checkpoints and reports."""
