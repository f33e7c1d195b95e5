"""The test that notices."""

from calc import add

total = add(2, 3)
if total != 5:
    raise SystemExit(f"add(2, 3) is {total}")
print("tests pass")
