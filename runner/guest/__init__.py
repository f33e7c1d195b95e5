"""What runs inside the sandbox: from the finished restrictions to the job's own code."""
