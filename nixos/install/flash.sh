# Flash an Orin's firmware as flake.lock has it: `flash [--dry-run] [--yes] BOARD`.
#
# Says what it will do, looks for the board in recovery mode on USB, asks once, builds the one script
# of jetpack-nixos that the board needs, and becomes it as root. flash.nix names the flake, its
# revision of jetpack-nixos, and the releases, as "orin-agx-devkit=36.5.0 ...".

# Modules' USB product names in recovery mode (Jetson Linux Developer Guide r36, "Quick Start": To
# Determine Whether the Developer Kit Is in Force Recovery Mode), with what their boards begin with.
declare -A modules=(
  [0955:7023]="orin-agx AGX Orin 64 GB, 32 GB devkit or Industrial"
  [0955:7223]="orin-agx AGX Orin 32 GB"
  [0955:7323]="orin-nx Orin NX 16 GB"
  [0955:7423]="orin-nx Orin NX 8 GB"
  [0955:7523]="orin-nano Orin Nano 8 GB"
  [0955:7623]="orin-nano Orin Nano 4 GB"
)
recovery="connect USB-C (AGX: the port beside the 40 pins), hold the recovery button, press reset \
(NX, Nano: bridge FC REC and GND, then power on), and try again"
board="" dry="" yes=""

refuse() {
  echo "flash: $1" >&2
  exit 2
}

# The reason why the board cannot be flashed now, in one line, or nothing.
wrong_device() {
  local vendor id found=()
  for vendor in "${ORIN_USB:-/sys/bus/usb/devices}"/*/idVendor; do
    [[ -e $vendor ]] || continue
    id=$(<"$vendor"):$(<"${vendor%Vendor}Product")
    [[ -z ${modules[$id]:-} ]] || found+=("$id")
  done
  if ((${#found[@]} == 0)); then
    echo "no Jetson in recovery mode is on USB: $recovery"
  elif ((${#found[@]} > 1)); then
    echo "${#found[@]} Jetsons in recovery mode are on USB (${found[*]}): leave one connected"
  elif [[ $board != "${modules[${found[0]}]%% *}"* ]]; then
    echo "on USB is ${found[0]}, an ${modules[${found[0]}]#* }, but $board is $expected"
  fi
}

known=""
for each in $ORIN_RELEASES; do known="${known:+$known, }${each%%=*}"; done
for word; do
  case $word in
  --dry-run) dry=1 ;;
  --yes) yes=1 ;;
  --help)
    echo "usage: flash [--dry-run] [--yes] BOARD, which is one of $known"
    exit
    ;;
  -*) refuse "there is no option $word: flash [--dry-run] [--yes] BOARD" ;;
  *) board=$word ;;
  esac
done
release=""
for each in $ORIN_RELEASES; do [[ $each != "$board="* ]] || release=${each#*=}; done
[[ -n $release ]] || refuse "there is no board '$board': write one of $known"
expected=""
for id in $(printf '%s\n' "${!modules[@]}" | sort); do
  [[ $board != "${modules[$id]%% *}"* ]] || expected="${expected:+$expected or }$id"
done
attribute=$ORIN_FLAKE#lib.flashScripts.$board
cat <<END
board     $board: $expected on USB
firmware  Jetson Linux $release, jetpack-nixos ${ORIN_REVISION:0:12}, as flake.lock has it
writes    the module's QSPI flash: boot firmware, UEFI, UEFI's variables
keeps     NVMe, eMMC, SD card and USB disks
builds    $attribute
takes     5 to 15 minutes; do not pull the cable
END
wrong=$(wrong_device)
if [[ -n $dry ]]; then
  echo "usb       ${wrong:-the board is there, in recovery mode}"
  echo "dry run: nothing was built or written"
  exit
fi
[[ -z $wrong ]] || refuse "$wrong"
if [[ -z $yes ]]; then
  read -rp "Write $board to go on, anything else to stop: " answer || true
  [[ ${answer:-} == "$board" ]] || refuse "stopped: nothing was written"
fi
built=$(nix --extra-experimental-features "nix-command flakes" build --no-link --print-out-paths "$attribute") ||
  refuse "Nix did not build the firmware: nix build $attribute"
# A board that was unplugged while Nix built.
wrong=$(wrong_device)
[[ -z $wrong ]] || refuse "$wrong"
programs=("$built"/bin/*)
((EUID == 0)) || programs=(sudo "${programs[@]}")
exec "${programs[@]}"
