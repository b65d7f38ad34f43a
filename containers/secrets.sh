#!/bin/sh
# Makes secrets/ for docker-compose.yml: passwords of chance, and the first admin key. What is there already stays.
set -eu
folder=${1:-secrets}
umask 077
mkdir -p "$folder"
word() { od -An -tx1 -N24 /dev/urandom | tr -d ' \n'; }
put() { # NAME TEXT; containers read it as another user, whom only the folder keeps out
    [ -e "$folder/$1" ] && return
    printf '%s\n' "$2" >"$folder/$1"
    chmod 0444 "$folder/$1"
}
put postgres_password "$(word)"
put database "postgresql+psycopg://whetstone:$(cat "$folder/postgres_password")@postgres:5432/whetstone"
put redis.conf "requirepass $(word)"
put broker "redis://:$(sed -n 's/^requirepass //p' "$folder/redis.conf")@redis:6379/0"
put admin_key "$(word)"
put grafana_password "$(word)"
echo "secrets are in $folder/: keep them out of version control, and back them up apart from the data"
