"""The trusted side of a node: claims jobs, isolates them, kills them with proof."""
