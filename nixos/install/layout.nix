# The disks that the installer makes, as disko has them: an EFI system partition, swap if the host has it,
# and ext4 on the rest, with the labels that `orin.host.disk` looks for.
{ lib, disko }:
let
  diskoLib = import disko { inherit lib; };

  layout = disk: {
    type = "disk";
    # A link that the installer makes to the disk that was chosen.
    device = "/dev/orin-disk";
    content = {
      type = "gpt";
      partitions = {
        boot = {
          priority = 1;
          type = "EF00";
          # Kernel and initrd of each generation that `boot.loader.systemd-boot.configurationLimit` keeps.
          size = "1G";
          content = {
            type = "filesystem";
            format = "vfat";
            mountpoint = "/boot";
            mountOptions = [ "umask=0077" ];
            extraArgs = [
              "-n"
              disk.boot
            ];
          };
        };
        root = {
          size = "100%";
          content = {
            type = "filesystem";
            format = "ext4";
            mountpoint = "/";
            mountOptions = [ "noatime" ];
            extraArgs = [
              "-L"
              disk.root
            ];
          };
        };
      }
      // lib.optionalAttrs (disk.swap != null) {
        swap = {
          priority = 2;
          size = "16G";
          content = {
            type = "swap";
            extraArgs = [
              "-L"
              disk.swap
            ];
          };
        };
      };
    };
  };
in
{
  # The program that erases a disk, formats it with the labels of `orin.host.disk`, and mounts it. It brings
  # no programs: gptfdisk, parted, dosfstools, e2fsprogs, jq, gawk, gnused, util-linux and udevadm are the
  # caller's, and so is the link to the disk.
  script =
    pkgs: disk: diskoLib._cliDestroyFormatMountNoDeps { disko.devices.disk.orin = layout disk; } pkgs;
}
