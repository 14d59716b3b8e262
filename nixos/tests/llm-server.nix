# The server answers a completion from a tiny synthetic model on the CPU device, on the loopback alone,
# and says what is wrong when there is no model.
{ self }:
{
  machine =
    { pkgs, ... }:
    {
      imports = [ self.nixosModules.llm-server ];
      virtualisation.memorySize = 4096;
      orin.llm-server = {
        enable = true;
        device = "CPU";
        models.tiny = {
          file = "/var/lib/models/tiny.gguf";
          context = 128;
        };
      };
      environment.systemPackages = [
        pkgs.jq
        pkgs.tinygrad-orin
      ];
    };

  testScript = ''
    import json

    server = "orin-llm-server-tiny.service"
    url = "http://127.0.0.1:8000"

    with subtest("no model: one line, and the server stays down"):
        machine.wait_until_succeeds(f"journalctl -u {server} | grep -F 'there is no such file: copy a GGUF there'")
        machine.wait_until_succeeds(f"systemctl is-failed {server}")
        machine.fail(f"curl -s {url}/v1/models")

    with subtest("started means answering"):
        machine.succeed("mkdir -p /var/lib/models")
        machine.succeed("orinbench synth --shape tiny --quant Q6_K /var/lib/models/tiny.gguf")
        machine.succeed(f"systemctl reset-failed {server}", f"systemctl start {server}")
        models = json.loads(machine.succeed(f"curl -sf {url}/v1/models"))
        assert len(models["data"]) == 1, models

    with subtest("a completion"):
        body = json.dumps({"model": "tiny", "max_tokens": 4, "prompt": "a"})
        answer = json.loads(machine.succeed(f"curl -sf -d '{body}' {url}/v1/completions"))
        assert answer["object"] == "text_completion", answer
        assert answer["usage"]["completion_tokens"] <= 4, answer

    with subtest("it is counted"):
        counted = machine.succeed(f"curl -sf {url}/metrics")
        assert "orinllm_generation_tokens_total" in counted, counted

    with subtest("nothing listens beyond the loopback, and it does not run as root"):
        listening = machine.succeed("ss -Hltn 'sport = :8000'")
        assert "127.0.0.1:8000" in listening and "0.0.0.0:8000" not in listening, listening
        pid = machine.succeed(f"systemctl show -P MainPID {server}").strip()
        assert machine.succeed(f"ps -o user= -p {pid}").strip() != "root"

    with subtest("a server that hangs is killed and started again by systemd's watchdog"):
        machine.succeed(f"kill -STOP {pid}")
        machine.wait_until_fails(f"kill -0 {pid}", timeout=120)
        machine.wait_until_succeeds(f"curl -sf {url}/v1/models")
        assert machine.succeed(f"systemctl show -P MainPID {server}").strip() != pid
  '';
}
