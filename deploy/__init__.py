"""What it takes to run Ringfence as services of a host."""
