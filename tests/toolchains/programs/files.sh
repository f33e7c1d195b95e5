# Copies that keep modes, times and links: tar, cp -a, install, and rsync where it is. Ends with "files ok".
set -eu
mkdir desk && cd desk
mkdir -p from/inner
echo secret >from/private && chmod 600 from/private
echo run >from/inner/tool && chmod 755 from/inner/tool
ln -s inner/tool from/link
touch -d '2001-02-03 04:05:06 UTC' from/inner/tool
chmod 1777 from/inner
modes() { (cd "$1" && find . -mindepth 1 -printf '%m %Y %T@ %p\n' | sed 's/\.[0-9]*//' | sort); }
cp -a from copy && test "$(modes from)" = "$(modes copy)"
mkdir unpacked && tar -cpf - -C from . | tar -xpf - -C unpacked && test "$(modes from)" = "$(modes unpacked)"
tar -czf from.tgz from && mkdir again && tar -xpzf from.tgz -C again && test "$(modes from)" = "$(modes again/from)"
install -D -m 750 from/private installed/here && test "$(stat -c %a installed/here)" = 750
if command -v rsync >/dev/null; then rsync -a from/ synced && test "$(modes from)" = "$(modes synced)"; fi
mv copy moved && rm -rf moved && test ! -e moved
sed -i 's/run/runs/' from/inner/tool && test "$(stat -c %a from/inner/tool)" = 755
echo "files ok"
