"""The vault: secrets at rest, who may have them, what was done with them, and how output is kept free of them."""
