"""The vocabulary: properties of every codec, grammar and state machine."""
