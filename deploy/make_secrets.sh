#!/bin/sh
# make_secrets.sh FOLDER NAME…: creates the secrets of a deployment, one folder for each process.
#
# NAMEs are the host names (or addresses) by which the collector and the policy server are reached. Tokens, keys and the
# certificate authority are created once; each call issues a new server certificate, valid for DAYS (default 365).
set -eu
umask 077
if [ $# -lt 2 ]; then
    echo "usage: make_secrets.sh FOLDER NAME…" >&2
    exit 2
fi
root=$1
shift
days=${DAYS:-365}
system_roots=/etc/ssl/certs/ca-certificates.crt
mkdir -p "$root"
cd "$root"
mkdir -p authority collector policy runner trainer agent

# Written under another name first, so that a failure leaves no empty secret; one that is there is refused.
secret() {
    if [ ! -e "$1" ]; then
        openssl rand -hex 32 >"$1.new"
        mv "$1.new" "$1"
    fi
    if [ ! -s "$1" ]; then
        echo "make_secrets.sh: $root/$1 is empty: delete it" >&2
        exit 1
    fi
}

token() {
    printf '%s = "%s"\n' "$1" "$(cat "authority/token-$1")"
}

for role in runner serving user agent reader; do
    secret "authority/token-$role"
done
secret authority/signing-key
secret authority/swap-token

{ token runner; token serving; token user; token agent; token reader; } >collector/tokens.toml
token serving >policy/tokens.toml
{ token runner; token agent; } >runner/tokens.toml
cp authority/token-reader trainer/reader-token
cp authority/signing-key policy/signing-key
cp authority/signing-key runner/signing-key
cp authority/swap-token policy/token
cp authority/swap-token trainer/token

if [ ! -e authority/ca.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 3650 -subj "/CN=trainspan" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout authority/ca.key.new -out authority/ca.crt 2>authority/openssl.log
    mv authority/ca.key.new authority/ca.key
fi

names=
for name in "$@"; do
    case $name in
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
    esac
    names="$names${names:+,}$kind:$name"
done
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -subj "/CN=trainspan server" \
    -keyout authority/tls.key -out authority/tls.csr 2>authority/openssl.log
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$names" >authority/tls.ext
openssl x509 -req -in authority/tls.csr -CA authority/ca.crt -CAkey authority/ca.key -CAcreateserial -days "$days" \
    -extfile authority/tls.ext -out authority/tls.crt 2>authority/openssl.log

for process in collector policy; do
    cp authority/tls.crt authority/tls.key "$process/"
done
# ca.crt for what speaks OTLP and Flight; trust.pem adds the system's certificates, for agents that also call other services.
for process in policy runner trainer agent; do
    cp authority/ca.crt "$process/ca.crt"
done
for process in runner trainer agent; do
    if [ -e "$system_roots" ]; then cat "$system_roots" authority/ca.crt; else cat authority/ca.crt; fi >"$process/trust.pem"
done
