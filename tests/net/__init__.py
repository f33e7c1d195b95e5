"""Jobs with net grants, the egress process they reach the network through, and the attacks on both."""
