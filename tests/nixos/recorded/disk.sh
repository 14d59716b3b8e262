if [ "$1" != "--yes-wipe-all-disks" ]; then
  echo "WARNING: This will destroy all data on the disks defined in disko.devices, which are:"
  echo
  # shellcheck disable=SC2043,2041
  for dev in /dev/orin-disk; do
    echo "  - $dev"
  done
  echo
  echo "    (If you want to skip this dialogue, pass --yes-wipe-all-disks)"
  echo
  echo "Are you sure you want to wipe the devices listed above?"
  read -rp "Type 'yes' to continue, anything else to abort: " confirmation

  if [ "$confirmation" != "yes" ]; then
    echo "Aborted."
    exit 1
  fi
fi

umount -Rv "/mnt" || :

# shellcheck disable=SC2043,2041
for dev in /dev/orin-disk; do
  $BASH /nix/store/any/disk-deactivate "$dev"
done

set -efux

disko_devices_dir=$(mktemp -d)
trap 'rm -rf "$disko_devices_dir"' EXIT
mkdir -p "$disko_devices_dir"

( # disk orin /dev/orin-disk   #
  destroy=1
  device=/dev/orin-disk
  imageName=orin
  imageSize=2G
  name=orin
  type=disk
  
  ( # gpt  /dev/orin-disk   #
    device=/dev/orin-disk
    efiGptPartitionFirst=1
    type=gpt
    
    if ! blkid "/dev/orin-disk" >&2; then
      sgdisk --clear "/dev/orin-disk"
    fi
    # try to create the partition, if it fails, try to change the type and name
    if ! sgdisk --align-end  \
    --new=1:0:+1G \
     --partition-guid="1:R" \
    --change-name="1:disk-orin-boot" \
    --typecode=1:EF00 \
    --attributes=1:=:0 \
     \
    "/dev/orin-disk" \
    
    then
      sgdisk --partition-guid="1:R" \
    --change-name="1:disk-orin-boot" \
    --typecode=1:EF00 \
    --attributes=1:=:0 \
     \
    "/dev/orin-disk" \
    
    fi
    # ensure /dev/disk/by-path/..-partN exists before continuing
    partprobe "/dev/orin-disk" || : # sometimes partprobe fails, but the partitions are still up2date
    udevadm trigger --subsystem-match=block
    udevadm settle --timeout 120
    # try to create the partition, if it fails, try to change the type and name
    if ! sgdisk --align-end  \
    --new=2:0:-0 \
     --partition-guid="2:R" \
    --change-name="2:disk-orin-root" \
    --typecode=2:8300 \
    --attributes=2:=:0 \
     \
    "/dev/orin-disk" \
    
    then
      sgdisk --partition-guid="2:R" \
    --change-name="2:disk-orin-root" \
    --typecode=2:8300 \
    --attributes=2:=:0 \
     \
    "/dev/orin-disk" \
    
    fi
    # ensure /dev/disk/by-path/..-partN exists before continuing
    partprobe "/dev/orin-disk" || : # sometimes partprobe fails, but the partitions are still up2date
    udevadm trigger --subsystem-match=block
    udevadm settle --timeout 120
    
    
    
    
    
    ( # filesystem  /dev/disk/by-partlabel/disk-orin-boot vfat /boot #
      device=/dev/disk/by-partlabel/disk-orin-boot
      declare -a extraArgs=(-n ESP)
      format=vfat
      declare -a mountOptions=('umask=0077')
      mountpoint=/boot
      type=filesystem
      
      if ! (blkid "/dev/disk/by-partlabel/disk-orin-boot" | grep -q 'TYPE='); then
        mkfs.vfat \
          -n ESP \
          "/dev/disk/by-partlabel/disk-orin-boot"
      fi
      
      
    )
    
    ( # filesystem  /dev/disk/by-partlabel/disk-orin-root ext4 / #
      device=/dev/disk/by-partlabel/disk-orin-root
      declare -a extraArgs=(-L nixos)
      format=ext4
      declare -a mountOptions=(noatime)
      mountpoint=/
      type=filesystem
      
      if ! (blkid "/dev/disk/by-partlabel/disk-orin-root" | grep -q 'TYPE='); then
        mkfs.ext4 \
          -L nixos \
          "/dev/disk/by-partlabel/disk-orin-root"
      fi
      
      
    )
    
    
    
    
  )
  
  
)


set -efux
# first create the necessary devices
(
  destroy=1
  device=/dev/orin-disk
  imageName=orin
  imageSize=2G
  name=orin
  type=disk
  
  (
    device=/dev/orin-disk
    efiGptPartitionFirst=1
    type=gpt
    
    
    
  )
  
  
)


# and then mount the filesystems in dependency order
(
  destroy=1
  device=/dev/orin-disk
  imageName=orin
  imageSize=2G
  name=orin
  type=disk
  
  (
    device=/dev/orin-disk
    efiGptPartitionFirst=1
    type=gpt
    
    (
      device=/dev/disk/by-partlabel/disk-orin-root
      declare -a extraArgs=(-L nixos)
      format=ext4
      declare -a mountOptions=(noatime)
      mountpoint=/
      type=filesystem
      
      if ! findmnt "/dev/disk/by-partlabel/disk-orin-root" "/mnt/" >/dev/null 2>&1; then
        mount "/dev/disk/by-partlabel/disk-orin-root" "/mnt/" \
          -t "ext4" \
          -o noatime \
          -o X-mount.mkdir
      fi
      
      
    )
    
    
  )
  
  
)
(
  destroy=1
  device=/dev/orin-disk
  imageName=orin
  imageSize=2G
  name=orin
  type=disk
  
  (
    device=/dev/orin-disk
    efiGptPartitionFirst=1
    type=gpt
    
    (
      device=/dev/disk/by-partlabel/disk-orin-boot
      declare -a extraArgs=(-n ESP)
      format=vfat
      declare -a mountOptions=('umask=0077')
      mountpoint=/boot
      type=filesystem
      
      if ! findmnt "/dev/disk/by-partlabel/disk-orin-boot" "/mnt/boot" >/dev/null 2>&1; then
        mount "/dev/disk/by-partlabel/disk-orin-boot" "/mnt/boot" \
          -t "vfat" \
          -o 'umask=0077' \
          -o X-mount.mkdir
      fi
      
      
    )
    
    
  )
  
  
)



