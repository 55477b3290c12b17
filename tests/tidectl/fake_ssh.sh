#!/bin/bash
# Stands for ssh: runs the command on this machine, with the state directory $FAKE_SSH/HOST/state. $FAKE_SSH/HOST/mode
# says how the connection fails.
while [[ $1 == -* && $1 != -- ]]; do shift; done
[[ $1 == -- ]] && shift
host=$1; shift
home=$FAKE_SSH/$host; mkdir -p -m 700 "$home"
echo "$*" >> "$home/commands"
export TIDE_STATE_DIR=$home/state
echo "Welcome to $host"
case $(cat "$home/mode" 2>/dev/null) in
refuse) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255 ;;
absent) echo "bash: line 1: python: No such file or directory" >&2; exit 127 ;;
hang) exec sleep 600 ;;
mute) echo hang > "$home/mode"; exec bash -c "$* | sed -u '5,\$d'" ;;
build) exec bash -c "$* | sed -u 's/\"build\":\"[0-9a-f]*\"/\"build\":\"beef\"/'" ;;
later) exec bash -c "$* | sed -u 's/\"protocol\":1/\"protocol\":2/'" ;;
esac
exec bash -c "$*"
