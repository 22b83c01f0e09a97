#!/bin/sh
# The certificate of the public installation, for PUBLIC_HOST: what lies in the folder or volume stays, and where there is
# none, one is made that nobody vouches for. tls.key is for the group of this process, which the proxy is in.
set -eu
cd /var/lib/towline
if [ -s tls.crt ] && [ -s tls.key ]; then
  openssl x509 -in tls.crt -noout -subject -enddate
  [ -r tls.key ] && exit
  echo "tls.key cannot be read by the proxy: chgrp 10001 tls.key, chmod 640 tls.key" >&2
  exit 1
fi
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 397 -keyout tls.key.new -out tls.crt.new \
  -subj "/CN=$PUBLIC_HOST" -addext "subjectAltName=DNS:$PUBLIC_HOST,DNS:localhost,IP:127.0.0.1" \
  -addext "extendedKeyUsage=serverAuth"
chmod 640 tls.key.new
chmod 644 tls.crt.new
chmod 750 .
mv tls.key.new tls.key
mv tls.crt.new tls.crt
echo "made a certificate for $PUBLIC_HOST that nobody vouches for"
