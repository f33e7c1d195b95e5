"""The `ringfence` command: parses, calls the API and prints; it decides nothing that the API does not."""
