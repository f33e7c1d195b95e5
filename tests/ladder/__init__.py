"""The ladder of levels A to F: one suite at every level that this user can have here, and hosts that lack something."""
