"""The scrubber: a confined process that what a job prints passes through, when the job was handed a value."""
