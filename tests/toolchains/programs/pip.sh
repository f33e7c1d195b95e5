# A virtual environment, and a package with a command out of the index folder $1, without a network. Ends with "pip ok".
set -eu
mkdir desk && cd desk
python3 -m venv env
env/bin/python -m pip install -q --disable-pip-version-check --no-index --find-links "$1" ringed
test "$(env/bin/ringed)" = "ringed 1.0"
env/bin/python -m pip list --disable-pip-version-check --format=freeze | grep -q 'ringed==1.0'
env/bin/python -m pip uninstall -q -y ringed
echo "pip ok"
