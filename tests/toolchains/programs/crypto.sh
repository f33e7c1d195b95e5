# openssl and the sqlite3 shell, each where it is. Ends with "crypto ok".
set -eu
mkdir desk && cd desk
if command -v openssl >/dev/null; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out cert -subj /CN=job 2>/dev/null
    echo text | openssl dgst -sha256 -sign key -out sig && openssl x509 -in cert -noout -subject >/dev/null
    test "$(echo text | openssl enc -aes-256-cbc -pbkdf2 -k k | openssl enc -d -aes-256-cbc -pbkdf2 -k k)" = text
fi
if command -v sqlite3 >/dev/null; then
    sqlite3 base 'pragma journal_mode=wal; create table t(x); insert into t values (1), (2);' >/dev/null
    test "$(sqlite3 base 'select sum(x) from t')" = 3
fi
echo "crypto ok"
