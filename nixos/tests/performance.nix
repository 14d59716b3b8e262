# The readback passes on a board in the asked state, and fails, naming what is off, on one in 30 W.
{ self }:
{
  machine =
    { pkgs, ... }:
    {
      imports = [ self.nixosModules.performance ];
      orin.board.check = false;
      orin.performance = {
        enable = true;
        cpuGovernor = null;
        root = "/var/lib/fake-board";
      };
      environment.systemPackages = [ pkgs.python3 ];
    };

  testScript = ''
    board = "python3 ${./fake_board.py} /var/lib/fake-board"
    readback = "orin-performance-readback.service"

    with subtest("no Jetson: the unit fails and says so"):
        machine.wait_until_succeeds(f"systemctl is-failed {readback}")
        machine.succeed(f"journalctl -u {readback} | grep -F 'is this a Jetson?'")

    with subtest("30 W instead of MAXN"):
        machine.succeed(f"{board} --mode MODE_30W")
        machine.fail(f"systemctl restart {readback}")
        machine.succeed(f"journalctl -u {readback} | grep -F 'TPC_PG_MASK is 240, MAXN wants 0'")
        machine.succeed(f"journalctl -u {readback} | grep -F 'may run up to 612000000, MAXN wants 1300500000'")

    with subtest("MAXN, but clocks that move"):
        machine.succeed(f"{board} --loose")
        machine.fail(f"systemctl restart {readback}")
        machine.succeed(f"journalctl -u {readback} | grep -F 'GPU may run from 306000000 to 1300500000'")

    with subtest("as asked"):
        machine.succeed(board)
        machine.succeed(f"systemctl restart {readback}")
        machine.succeed(f"journalctl -u {readback} | grep -F 'the board is in MAXN with pinned clocks'")
  '';
}
