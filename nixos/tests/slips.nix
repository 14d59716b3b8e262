# Values that are right by their form and wrong by what they name: cases of assertions.nix.
{ lib, imitation }:
{
  places = {
    host = imitation {
      users.users.alice.home = "/home/alice";
      orin.host.modelFolder = "/home/alice";
      orin.telemetry = {
        textfileDirectory = "/var/lib/orin-cache";
        grafana.secretKeyFile = "/var/lib/secrets/";
        exporter = {
          webConfigFile = "/var/lib/secrets/web.yml";
          webFiles."web.yml" = "/var/lib/secrets/tls.key";
        };
      };
      orin.upgrade = {
        enable = true;
        flake = "/nix/store/00000000000000000000000000000000-source";
        units = [ "orin-upgrade-check.service" ];
      };
      orin.backup = {
        enable = true;
        repository = "/var/lib/orin-backup";
        passwordFile = "/var/lib/secrets/backup";
        databases.history = lib.mkForce "/var/lib/orin-backup/history.db";
      };
      orin.llm-server.models = {
        main.file = lib.mkForce "/var/lib/models/model.safetensors";
        ${lib.concatStrings (lib.replicate 64 "a")} = {
          file = "/var/lib/models/model.gguf";
          port = 8001;
        };
      };
    };
    wanted = [
      ''orin.host.modelFolder = "/home/alice": the folder is given to orin, and this is somebody''
      ''orin.telemetry.textfileDirectory = "/var/lib/orin-cache": the folder is given to the group video''
      ''orin.telemetry.grafana.secretKeyFile = "/var/lib/secrets/" ends with a slash''
      ''orin.telemetry.exporter.webFiles = "web.yml": `webConfigFile` itself is handed over''
      ''orin.upgrade.flake = "/nix/store/00000000000000000000000000000000-source": write a path''
      ''orin.upgrade.units = [ "orin-upgrade-check.service" ]: the check cannot wait for itself''
      ''orin.backup.repository = "/var/lib/orin-backup": what lies there is backed up''
      ''orin.backup.databases."history" = "/var/lib/orin-backup/history.db": the copies are made there''
      ''orin.llm-server.models.main.file = "/var/lib/models/model.safetensors": the engines read GGUF''
      "the name becomes part of a unit's: lower-case letters, digits, - and _, 63 at most"
    ];
  };
  secrets = {
    host = imitation {
      users.users.alice.home = "/home/alice";
      orin.host.sshKeys = lib.mkForce [
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----"
      ];
      orin.tinygrad.device = "AMD";
      orin.telemetry = {
        textfileDirectory = "/home/alice";
        exporter.scrape = {
          basic_auth.password = "hunter2";
          tls_config.key_file = "tls.key";
        };
        alertmanager = {
          enable = true;
          configuration.receivers = [
            { webhook_configs = [ { url = "https://me:hunter2@example.org"; } ]; }
            { slack_configs = [ { api_url = "https://hooks.slack.com/services/T/B/X"; } ]; }
            { msteams_configs = [ { webhook_url = "https://example.org/X"; } ]; }
          ];
        };
      };
      orin.llm-gateway = {
        enable = true;
        environmentFile = "/var/lib/secrets/gateway";
        servers.a = {
          url = "http://orin 1:8000";
          models = [ "main model" ];
          keyVariable = "LITELLM_MASTER_KEY";
        };
      };
    };
    wanted = [
      "orin.host.sshKeys holds a private key, which would lie in the Nix store"
      ''orin.tinygrad.device = "AMD": tinygrad has none of this name on an Orin''
      ''orin.telemetry.textfileDirectory = "/home/alice": this is a user's home''
      ''orin.telemetry.exporter.scrape = [ "password" ]: this would lie in the Nix store''
      ''orin.telemetry.exporter.scrape, key_file = "tls.key": write a file of the board''
      ''orin.telemetry.alertmanager.configuration = [ "url" "api_url" "webhook_url" ]: this would lie''
      ''orin.llm-gateway.servers.a.url = "http://orin 1:8000" is no address''
      ''orin.llm-gateway.servers.a.models = [ "main model" ]: a name here is empty or holds a space''
      ''orin.llm-gateway.servers.a.keyVariable = "LITELLM_MASTER_KEY": this is the gateway's own key''
    ];
  };
}
