"""Levels C to F: jobs that policy trusts, on hosts that can't make namespaces. No namespace and no mount is used."""
