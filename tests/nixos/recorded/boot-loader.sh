/nix/store/any/bin/python3 /nix/store/any/upgrade.py arm --esp /boot "$1"
