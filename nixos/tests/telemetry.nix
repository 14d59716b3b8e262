# Exporter over a made-up board, Prometheus with our rules, node_exporter, Grafana with our dashboards.
{ self }:
{
  machine =
    { lib, pkgs, ... }:
    let
      recording = pkgs.runCommand "recording" { nativeBuildInputs = [ pkgs.tinygrad-orin.python ]; } ''
        mkdir $out
        python3 ${./record_scenario.py} $out
      '';
    in
    {
      imports = [ self.nixosModules.telemetry ];
      orin.telemetry = {
        enable = true;
        exporter.extraFlags = [
          "--replay"
          "${recording}"
        ];
        grafana.secretKeyFile = "/var/lib/secrets/grafana-secret-key";
        grafana.adminPasswordFile = "/var/lib/secrets/grafana-admin";
        prometheus.scrapeInterval = "1s";
      };
      systemd.tmpfiles.rules = lib.mkBefore [
        "d /var/lib/secrets 0700 root root -"
        "f /var/lib/secrets/grafana-secret-key 0400 root root - 0123456789abcdef"
        "f /var/lib/secrets/grafana-admin 0400 root root - correct-horse"
      ];
      environment.systemPackages = [ pkgs.jq ];
    };

  testScript = ''
    import json

    def query(expression):
        answer = machine.succeed(f"curl -sfG --data-urlencode 'query={expression}' http://127.0.0.1:9090/api/v1/query")
        return json.loads(answer)["data"]["result"]

    for unit in ["jetson-exporter", "prometheus", "prometheus-node-exporter", "grafana"]:
        machine.wait_for_unit(f"{unit}.service")
    for port in [9401, 9090, 9100, 3000]:
        machine.wait_for_open_port(port)

    with subtest("every target is up, and the board's figures arrive"):
        for job in ["jetson", "node", "prometheus"]:
            machine.wait_until_succeeds(
                f"curl -sfG --data-urlencode 'query=up{{job=\"{job}\"}} == 1' http://127.0.0.1:9090/api/v1/query"
                " | jq -e '.data.result | length == 1'"
            )
        machine.wait_until_succeeds("curl -sf http://127.0.0.1:9401/metrics | grep '^jetson_module_power_watts '")
        assert query("jetson_power_mode_info")[0]["metric"]["name"] == "MAXN"

    with subtest("our rules are loaded and none is broken"):
        groups = json.loads(machine.succeed("curl -sf http://127.0.0.1:9090/api/v1/rules"))["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) > 10, rules
        machine.wait_until_succeeds("sleep 3")
        assert not [rule for rule in rules if rule.get("lastError")], rules

    with subtest("node_exporter does not read the zones that hang"):
        machine.fail("curl -sf http://127.0.0.1:9100/metrics | grep '^node_thermal_zone_temp'")

    with subtest("Grafana has the dashboards, asks for the password, and shows nothing without"):
        machine.wait_until_succeeds("curl -sf http://127.0.0.1:3000/api/health")
        machine.fail("curl -sf http://127.0.0.1:3000/api/search")
        machine.fail("curl -sf -u admin:admin http://127.0.0.1:3000/api/search")
        found = json.loads(machine.succeed("curl -sf -u admin:correct-horse http://127.0.0.1:3000/api/search?type=dash-db"))
        assert {"jetson-board", "jetson-llm", "orinbench-history"} <= {entry["uid"] for entry in found}, found

    with subtest("nothing listens beyond the loopback"):
        listening = machine.succeed("ss -Hltn '( sport = :9401 or sport = :9090 or sport = :9100 or sport = :3000 )'")
        assert "0.0.0.0:" not in listening and "*:" not in listening.replace("0.0.0.0:*", "").replace("[::]:*", ""), listening
  '';
}
