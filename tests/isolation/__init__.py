"""What a hostile job tries from inside. Runs as root (level A) and again as an ordinary user (level B)."""
