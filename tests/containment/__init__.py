"""The containment core: spawning, views, kills, proofs. Real processes; as root at level A, else at level B."""
