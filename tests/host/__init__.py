"""The host's side of the containment: control groups, uids, path grants, id maps, clean-up, the probe."""
