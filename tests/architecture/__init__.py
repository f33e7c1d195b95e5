"""Rules on the source tree itself: sizes, imports, layers and texts."""
