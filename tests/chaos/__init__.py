"""Jobs under random faults: every one ends once, none runs twice at a time. `make chaos` runs the long form."""
