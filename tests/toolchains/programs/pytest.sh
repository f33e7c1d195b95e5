# pytest with two workers of xdist, run by the interpreter $1. Ends with "pytest ok".
set -eu
mkdir desk && cd desk
printf 'import os, pytest\n@pytest.mark.parametrize("n", range(20))\ndef test_it(n, tmp_path):\n    (tmp_path / "x").write_text("x")\n' >test_it.py
printf 'def test_worker():\n    assert os.environ["PYTEST_XDIST_WORKER"]\n' >>test_it.py
"$1" -B -m pytest -q -n 2 -p no:cacheprovider test_it.py | grep -q '21 passed'
echo "pytest ok"
