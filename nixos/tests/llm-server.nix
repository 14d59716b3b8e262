# tinygrad's server answers a completion from a tiny synthetic model on the CPU device, on the loopback
# alone, and says what is wrong when there is no model.
{ self }:
{
  machine =
    { pkgs, ... }:
    {
      imports = [ self.nixosModules.llm-server ];
      virtualisation.memorySize = 4096;
      orin.llm-server = {
        enable = true;
        model = "/var/lib/models/tiny.gguf";
        device = "CPU";
        maxContext = 128;
        metrics.enable = true;
      };
      environment.systemPackages = [
        pkgs.jq
        pkgs.tinygrad-orin
      ];
    };

  testScript = ''
    import json

    server = "orin-llm-server.service"
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
        body = json.dumps({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]})
        answer = json.loads(machine.succeed(f"curl -sf -d '{body}' {url}/v1/chat/completions"))
        assert answer["object"] == "chat.completion", answer
        assert answer["usage"]["completion_tokens"] <= 4, answer

    with subtest("it is counted"):
        counted = machine.succeed("curl -sf http://127.0.0.1:9403/metrics")
        assert 'llm_requests_total{status="200"} 1.0' in counted, counted

    with subtest("nothing listens beyond the loopback, and the engine reaches nobody"):
        for port in [8000, 8001, 9403]:
            listening = machine.succeed(f"ss -Hltn 'sport = :{port}'")
            assert f"127.0.0.1:{port}" in listening and f"0.0.0.0:{port}" not in listening, listening
        pid = machine.succeed(f"systemctl show -P MainPID {server}").strip()
        interfaces = json.loads(machine.succeed(f"nsenter -n -t {pid} ip -j link"))
        assert [interface["ifname"] for interface in interfaces] == ["lo"], interfaces

    with subtest("it does not run as root, and the health check passes"):
        assert machine.succeed(f"ps -o user= -p {pid}").strip() != "root"
        machine.succeed("systemctl start orin-llm-server-health.service")

    with subtest("a server that hangs is restarted"):
        machine.succeed(f"kill -STOP {pid}")
        machine.succeed("systemctl start orin-llm-server-restart.service")
        machine.wait_until_succeeds(f"curl -sf {url}/v1/models")
        assert machine.succeed(f"systemctl show -P MainPID {server}").strip() != pid
  '';
}
