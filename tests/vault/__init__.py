"""The vault's parts, without a broker around them."""
