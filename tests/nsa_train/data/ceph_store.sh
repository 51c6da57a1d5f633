#!/bin/bash
# A genuine S3 service for a test: Ceph's monitor, one in-memory OSD and the gateway, all on the loopback interface.
#   ceph_store.sh start DIR   installs what is missing, starts, prints one line of JSON: endpoint, access_key, secret_key
#   ceph_store.sh stop DIR    stops in the order gateway, OSD, monitor, by the process ids in DIR
set -euo pipefail
action=$1 dir=$2

stop_one() {
  if [ -f "$dir/$1.pid" ]; then kill "$(cat "$dir/$1.pid")" 2>/dev/null || true; rm -f "$dir/$1.pid"; sleep 1; fi
}

if [ "$action" = stop ]; then
  for daemon in rgw osd mon; do stop_one $daemon; done
  exit 0
fi

exec 3>&1 1>&2 # only the last line goes to stdout; daemons must not hold it open, or the caller waits for them
if ! command -v radosgw >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends radosgw ceph-mon ceph-osd ceph-common
fi
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
mkdir -p "$dir"/{mon,osd,rgw,run}
fsid=$(cat /proc/sys/kernel/random/uuid)
mon_port=$(free_port) rgw_port=$(free_port)
export CEPH_CONF=$dir/ceph.conf
cat >"$CEPH_CONF" <<CONF
[global]
fsid = $fsid
mon host = v1:127.0.0.1:$mon_port
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr2 = false
# cephx stays on: with auth none the gateway hangs
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
run dir = $dir/run
admin socket = $dir/run/\$name.asok
keyring = $dir/keyring
log file = $dir/\$name.log
setuser match path = none
[mon.a]
mon data = $dir/mon
[osd.0]
osd data = $dir/osd
osd objectstore = memstore
memstore device bytes = 2147483648
[client.rgw]
rgw data = $dir/rgw
rgw frontends = beast endpoint=127.0.0.1:$rgw_port
rgw thread pool size = 16
CONF

ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
ceph-authtool "$dir/keyring" --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
ceph-authtool "$dir/keyring" --gen-key -n client.rgw --cap mon 'allow rwx' --cap osd 'allow rwx'
monmaptool --create --clobber --fsid "$fsid" --addv a "[v1:127.0.0.1:$mon_port]" "$dir/monmap"
ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
ceph-mon -i a -f >"$dir/mon.out" 2>&1 3>&- &
echo $! >"$dir/mon.pid"
timeout 60 ceph --connect-timeout 50 mon stat

# The monitor took its keys at mkfs; the other daemons' keys are told to it.
ceph auth import -i "$dir/keyring"
ceph osd new "$(cat /proc/sys/kernel/random/uuid)" 0
ceph osd crush add osd.0 1.0 root=default host=localhost
ceph-osd -i 0 --mkfs --osd-uuid "$(ceph osd dump -f json | python3 -c 'import json, sys; print(json.load(sys.stdin)["osds"][0]["uuid"])')"
ceph-osd -i 0 -f >"$dir/osd.out" 2>&1 3>&- &
echo $! >"$dir/osd.pid"
for _ in $(seq 60); do ceph osd stat | grep -q '1 up' && break || sleep 0.5; done

radosgw -f -n client.rgw >"$dir/rgw.out" 2>&1 3>&- &
echo $! >"$dir/rgw.pid"
for _ in $(seq 120); do (exec 4<>"/dev/tcp/127.0.0.1/$rgw_port") 2>/dev/null && break || sleep 0.5; done
radosgw-admin -n client.rgw user create --uid=test --display-name=test >"$dir/user.json"
python3 - "$dir/user.json" "$rgw_port" >&3 <<'PY'
import json, sys

key = json.load(open(sys.argv[1]))["keys"][0]
answer = {"endpoint": f"http://127.0.0.1:{sys.argv[2]}", "access_key": key["access_key"], "secret_key": key["secret_key"]}
print(json.dumps(answer))
PY
