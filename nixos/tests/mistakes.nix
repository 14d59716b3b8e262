# Values of options that are wrong, as many as one host can have at once: cases of assertions.nix.
{ lib, imitation }:
{
  missing = imitation {
    orin = {
      host.sshKeys = lib.mkForce [ ];
      host.disk.root = lib.mkForce null;
      llm-server.models = lib.mkForce { };
    };
  };
  forAllToSee = imitation {
    orin.llm-server = {
      models.main.file = lib.mkForce ./assertions.nix;
      openFirewall = true;
    };
    orin.telemetry = {
      exporter.openFirewall = true;
      grafana.secretKeyFile = lib.mkForce ./assertions.nix;
      grafana.listenAddress = "0.0.0.0";
      prometheus.remoteWrite = [
        {
          url = "https://metrics.example.org/api/v1/write";
          basic_auth.username = "orin";
          basic_auth.password = "hunter2";
        }
      ];
    };
  };
  engine = imitation {
    orin.llm-server = {
      models.main.file = lib.mkForce "models/model.gguf";
      insecure = true;
      apiKeyFile = "/var/lib/secrets/llm-keys";
      metrics = false;
    };
    orin.telemetry.grafana.openFirewall = true;
    orin.telemetry.prometheus.remoteWrite = [
      {
        url = "https://metrics.example.org/api/v1/write";
        sigv4.secret_key = "hunter2";
      }
    ];
  };

  # Values of options, as many as one host can have wrong at once.
  values = imitation {
    orin.host = {
      user = lib.mkForce "Bob.Smith";
      sshKeys = lib.mkForce [ "~/.ssh/id_ed25519.pub" ];
      disk.root = lib.mkForce "/dev/disk/by-label/nixos";
      disk.boot = lib.mkForce "EFI-PARTITION";
      modelFolder = "${./.}";
      caches."cache.example.org" = "AAAA";
    };
    orin.tinygrad = {
      device = "cuda";
      environment."DEBUG=2" = "";
      users = [ "carol" ];
    };
    orin.performance = {
      powerMode = "maxn";
      cpuGovernor = "fast";
    };
    orin.telemetry = {
      exporter = {
        listenAddress = "127.0.0.1:9401";
        port = 80;
        webFiles."tls.key" = "/var/lib/secrets/tls.key";
      };
      grafana = {
        listenAddress = "*";
        port = 443;
        secretKeyFile = "secrets/key";
        adminPasswordFile = "secrets/key";
      };
      prometheus = {
        retention = "30 days";
        scrapeInterval = "five seconds";
        remoteWrite = [ { url = "metrics.example.org"; } ];
        extraScrapeConfigs = [ { job_name = "node"; } ];
      };
    };
    orin.llm-server = {
      host = "0.0.0.0:8000";
      apiKeyFile = "~/keys";
      environment."A-B" = "1";
      models = {
        main = {
          file = lib.mkForce "/var/lib/models/My Model.gguf";
          memory = "40 %";
          port = 9090;
        };
        folder = {
          file = "/var/lib/models/";
          port = 22;
          extraFlags = [ "--port=9000" ];
        };
        "Big Model" = {
          file = "https://example.org/model.gguf";
          port = 8005;
        };
      };
    };
    orin.llm-gateway = {
      enable = true;
      host = "0.0.0.0";
      servers.orin-1 = {
        url = "orin-1:8000";
        models = [ "main" ];
      };
    };
  };
  # And those that exclude one of the above.
  others = imitation {
    orin.host.user = lib.mkForce "root";
    orin.host.disk.boot = lib.mkForce "nixos";
    orin.telemetry.alertmanager.enable = true;
    orin.telemetry.prometheus.enable = lib.mkForce false;
    orin.llm-server = {
      host = "0.0.0.0";
      backend = "llama-cpp";
      models.main.queue = 4;
    };
    orin.llm-gateway = {
      enable = true;
      environmentFile = "${./assertions.nix}";
    };
    orin.upgrade = {
      enable = true;
      units = [ "orin-gpu" ];
    };
    orin.cache = {
      enable = true;
      openFirewall = true;
      port = 9401;
    };
    orin.backup.enable = true;
  };
  # What an attacker of these modules thought of next.
  more = imitation {
    users.users.grafana.isSystemUser = true;
    orin.host = {
      user = lib.mkForce "grafana";
      sshKeys = lib.mkForce [ "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAbc me@laptop" ];
      disk.swap = "nixos";
      modelFolder = "/var/lib/";
    };
    orin.tinygrad.environment = {
      DEV = "CPU";
      HF_TOKEN = "hf_abc";
      PATH = "/opt/bin";
    };
    orin.telemetry = {
      textfileDirectory = "${./.}";
      exporter = {
        debugfs.port = 81;
        extraFlags = [ "--listen=0.0.0.0:9401" ];
        webConfigFile = "/var/lib/secrets/web.yml";
        webFiles."tls/key" = "secrets/tls.key";
      };
      prometheus = {
        port = 90;
        retention = "0d";
        scrapeInterval = "1h";
        remoteWrite = [
          {
            url = "https://orin:hunter2@metrics.example.org/write";
            headers.Authorization = "Bearer hunter2";
          }
        ];
        extraScrapeConfigs = [
          {
            job_name = "other";
            basic_auth.password = "hunter2";
          }
          { job_name = "other"; }
        ];
      };
      alertmanager = {
        enable = true;
        port = 93;
        configuration.receivers = [ { email_configs = [ { auth_password = "hunter2"; } ]; } ];
      };
    };
    orin.llm-server = {
      apiKeyFile = "/var/lib/secrets/keys";
      metricsKeyFile = "/var/lib/secrets/keys";
      device = "gpu";
      watchdog = 1;
      startTimeout = 3600;
      models.main = {
        draftModel = "/var/lib/models/model.gguf";
        extraFlags = [ "--insecure" ];
      };
    };
    orin.llm-gateway = {
      enable = true;
      environmentFile = "/var/lib/secrets/gateway";
      host = "0.0.0.0:4000";
      port = 88;
      timeout = 10;
      servers.a = {
        url = "http://orin-1:8000";
        models = [
          "main"
          "main"
        ];
      };
      servers.b = {
        url = "http://orin-1:8000";
        models = [ "main" ];
      };
      servers.c = {
        url = "http://me:hunter2@orin-2:8000";
        models = [ "main" ];
      };
    };
    orin.upgrade = {
      enable = true;
      dates = "every sunday";
      flake = "../orins";
      units = [
        "orin-gpux.service"
        "sshx.service"
      ];
    };
    orin.backup = {
      enable = true;
      repository = "backup/orin";
      passwordFile = "/var/lib/secrets/backup";
      dates = "at night";
      paths = [ "/" ];
      databases."a/b" = "history.db";
    };
  };
  # What a reviewer of the above found to pass.
  yetMore = imitation {
    orin.host = {
      modelFolder = "/etc/ssh";
      # The second is right: a file that was read ends with a line's end.
      sshKeys = lib.mkForce [
        "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBvZiBub2JvZHksIGZvciB0aGUgZXhhbXBsZXMh"
        "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBA=="
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBvZiBub2JvZHksIGZvciB0aGUgZXhhbXBsZXMh\n"
      ];
      caches."https://cache.example.org " = "c:74DUi4Ye579gUqzH4ziL9IyiJBlDpMRn9MBN8oNan9M=";
    };
    orin.telemetry = {
      textfileDirectory = "/etc";
      exporter = {
        listenAddress = "300.168.1.5";
        extraFlags = [ "--sample-rate 20" ];
      };
      prometheus = {
        retention = "30m1d";
        scrapeInterval = "5s5s";
        remoteWrite = [
          {
            url = "https://metrics.example.org/write";
            basic_auth.password_file = "secrets/metrics";
          }
        ];
        extraScrapeConfigs = [
          {
            job_name = "other";
            tls_config.ca_file = "${./mistakes.nix}";
            tls_config.key_file = "${./mistakes.nix}";
          }
        ];
      };
      alertmanager = {
        enable = true;
        configuration.global.smtp_auth_password_file = "mail";
      };
    };
    services.prometheus.scrapeConfigs = [ { job_name = "node"; } ];
    orin.llm-server.models.main = {
      file = lib.mkForce "/var/lib/models/../model.gguf";
      extraFlags = [ "--ctx-size 4096" ];
    };
    orin.llm-gateway = {
      enable = true;
      environmentFile = "/var/lib/secrets/gateway";
      servers = {
        a.url = "http://orin-1:8000";
        a.models = [ ];
        b.url = "http://orin-2:8000";
        b.models = [ "main" ];
        c.url = "http://orin-2:8000/";
        c.models = [ "main" ];
      };
    };
    orin.upgrade = {
      enable = true;
      dates = "25:99";
    };
    orin.cache = {
      enable = true;
      listenAddress = "orin-1.local";
    };
    orin.backup = {
      enable = true;
      repository = "sftp:nas";
      passwordFile = "/var/lib/secrets/backup";
      dates = "2026-13-01 04:00";
      paths = [ "/srv/../.." ];
      databases.other = "/var/lib/other/";
    };
  };
  # Whose repository's address holds the password.
  passwords = imitation {
    orin.backup = {
      enable = true;
      repository = "rest:https://me:hunter2@nas/orin-1";
      passwordFile = "/var/lib/secrets/backup";
    };
  };

  # Values that are right by their form and wrong by what they name.
  places = imitation {
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
  # What a stranger thought of, who has not seen the rules.
  stranger = imitation {
    fileSystems."/boot".fsType = "vfat";
    orin.upgrade = {
      enable = true;
      flake = "github:me";
      ssh = 2222;
      peer = "localhost:22";
      units = [ "orin-restart.service" ];
    };
    orin.backup = {
      enable = true;
      repository = "/boot/backup";
      passwordFile = "/var/lib/secrets/backup";
      paths = [ "/boot" ];
    };
    orin.llm-server = {
      models.main.mmproj = "/var/lib/models/mmproj.bin";
      environment.XDG_CACHE_HOME = "/tmp";
    };
    orin.telemetry.exporter.extraFlags = [ "--once" ];
  };
  secrets = imitation {
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
      environmentFile = "/tmp/gateway";
      servers.itself = {
        url = "http://127.0.0.1:4000";
        models = [ "main" ];
      };
      servers.a = {
        url = "http://orin 1:8000";
        models = [ "main model" ];
        keyVariable = "LITELLM_MASTER_KEY";
      };
    };
  };
}
