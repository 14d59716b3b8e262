# The disks that the installer makes, as disko has them: an EFI system partition, swap if the host has it,
# and ext4 on the rest, with the labels that `orin.host.disk` looks for.
{ lib, disko }:
let
  diskoLib = import disko { inherit lib; };
  filesystem = format: mountpoint: extraArgs: mountOptions: {
    type = "filesystem";
    inherit
      format
      mountpoint
      extraArgs
      mountOptions
      ;
  };
in
rec {
  # Where an Orin may be installed.
  devices = {
    nvme = "/dev/nvme0n1";
    emmc = "/dev/mmcblk0";
  };
  # First choice first.
  order = [
    "nvme"
    "emmc"
  ];

  # name: of `devices`, and part of the partitions' names, which differ from disk to disk thereby.
  # disk: the labels, `orin.host.disk` of the host.
  layout = name: disk: {
    disko.devices.disk.${name} = {
      type = "disk";
      device = devices.${name};
      content = {
        type = "gpt";
        partitions = {
          boot = {
            priority = 1;
            type = "EF00";
            # Kernel and initrd of each generation that `boot.loader.systemd-boot.configurationLimit` keeps.
            size = "1G";
            content =
              filesystem "vfat" "/boot"
                [
                  "-n"
                  disk.boot
                ]
                [ "umask=0077" ];
          };
          root = {
            size = "100%";
            content = filesystem "ext4" "/" [
              "-L"
              disk.root
            ] [ "noatime" ];
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
  };

  # By the short name of a disk: disko's program that erases it, formats it with the labels of
  # `orin.host.disk`, and mounts it. It brings no programs: gptfdisk, parted, dosfstools, e2fsprogs, jq,
  # gawk, gnused, util-linux and udevadm are the caller's.
  scripts =
    pkgs: disk:
    lib.mapAttrs (
      name: _: diskoLib._cliDestroyFormatMountNoDeps (layout name disk) pkgs
    ) devices;
}
