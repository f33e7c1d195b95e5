"""Speed against stock RQ, measured in one run (`make bench`)."""
