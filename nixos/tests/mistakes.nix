# Values of options that are wrong, as many as one host can have at once: cases of assertions.nix.
{ lib, imitation }:
{
  missing = {
    host = imitation {
      orin = {
        host.sshKeys = lib.mkForce [ ];
        host.disk.root = lib.mkForce null;
        llm-server.models = lib.mkForce { };
      };
    };
    wanted = [
      "orin.host.sshKeys is empty"
      "orin.host.disk.root is not set"
      "orin.llm-server.models is empty"
    ];
  };
  forAllToSee = {
    host = imitation {
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
    wanted = [
      "orin.llm-server.models.main.file is in the Nix store"
      "orin.telemetry.grafana.secretKeyFile is in the Nix store"
      "remoteWrite holds a password"
      "the server listens on 127.0.0.1 only"
      "the exporter listens on"
    ];
  };
  engine = {
    host = imitation {
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
    wanted = [
      "is no absolute path"
      "orin.llm-server.insecure is true, and apiKeyFile"
      "orin.telemetry.grafana.openFirewall is true, but Grafana listens on 127.0.0.1 only"
      "remoteWrite holds a password"
    ];
  };

  # Values of options, as many as one host can have wrong at once.
  values = {
    host = imitation {
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
    wanted = [
      ''orin.host.user = "Bob.Smith": systemd takes lower-case letters''
      ''orin.host.sshKeys = "~/.ssh/id_ed25519.pub": write the content''
      ''orin.host.disk.root = "/dev/disk/by-label/nixos": write the label alone''
      ''orin.host.disk.boot = "EFI-PARTITION": write the label alone''
      "the Nix store is read-only"
      ''orin.host.caches."cache.example.org" = "AAAA": write where the cache is''
      ''orin.host.caches."cache.example.org" = "AAAA": write name:key''
      ''orin.tinygrad.device = "cuda": tinygrad has none of this name''
      "orin.tinygrad.environment.\"DEBUG=2\""
      ''orin.tinygrad.users = "carol": there is no such user''
      ''orin.performance.powerMode = "maxn": no generic has it''
      ''orin.performance.cpuGovernor = "fast": Linux has none''
      ''orin.telemetry.exporter.listenAddress = "127.0.0.1:9401": write an address alone''
      "orin.telemetry.exporter.port = 80: this service does not run as root"
      "orin.telemetry.exporter.webFiles = [ \"tls.key\" ]: nothing names these files"
      ''orin.telemetry.grafana.listenAddress = "*": write an address alone''
      "orin.telemetry.grafana.port = 443: this service does not run as root"
      ''orin.telemetry.grafana.secretKeyFile = "secrets/key" is no absolute path''
      ''orin.telemetry.grafana.adminPasswordFile = "secrets/key" is no absolute path''
      ''orin.telemetry.grafana.adminPasswordFile = "secrets/key": this is `secretKeyFile` too''
      ''orin.telemetry.prometheus.retention = "30 days": write a number and a unit''
      ''orin.telemetry.prometheus.scrapeInterval = "five seconds": write a number and a unit''
      ''orin.telemetry.prometheus.remoteWrite = "metrics.example.org": write the scheme too''
      ''orin.telemetry.prometheus.extraScrapeConfigs = "node": this host has a job of that name''
      ''orin.llm-server.host = "0.0.0.0:8000": write an address alone''
      "orin.llm-server.metricsKeyFile is not set"
      ''orin.llm-server.apiKeyFile = "~/keys" is no absolute path''
      "orin.llm-server.environment.\"A-B\""
      ''orin.llm-server.models.main.file = "/var/lib/models/My Model.gguf" holds a space''
      ''orin.llm-server.models.main.memory = "40 %": write a share''
      "orin.llm-server.models.main.port and orin.telemetry.prometheus.port are both 9090"
      ''orin.llm-server.models.folder.file = "/var/lib/models/" ends with a slash''
      "orin.llm-server.models.folder.port and services.openssh.ports.[0] are both 22"
      "orin.llm-server.models.folder.port = 22: this service does not run as root"
      "orin.llm-server.models.folder.extraFlags = [ \"--port=9000\" ]: an option sets one"
      ''orin.llm-server.models."Big Model": the name becomes part''
      ''orin.llm-server.models.Big Model.file = "https://example.org/model.gguf": the server downloads''
      ''orin.llm-server.models.Big Model.file = "https://example.org/model.gguf" is no absolute path''
      "orin.llm-gateway.environmentFile is not set"
      ''orin.llm-gateway.servers.orin-1.url = "orin-1:8000" is no address''
    ];
  };
  # And those that exclude one of the above.
  others = {
    host = imitation {
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
    wanted = [
      ''orin.host.user = "root": root logs in''
      ''orin.host.disk.boot = "nixos": two file systems''
      "orin.telemetry.alertmanager.enable = true: no Prometheus of this host"
      ''orin.llm-server.host = "0.0.0.0" answers everyone who reaches it''
      "orin.llm-server.models.main: llama.cpp has no `memory` and no `queue`"
      "orin.llm-gateway.servers names no model"
      "orin.upgrade.units = [ \"orin-gpu\" ]: name at least one unit, with its ending"
      "the cache listens on 127.0.0.1 only"
      "orin.cache.port and orin.telemetry.exporter.port are both 9401"
      ''orin.backup.repository = "": write where to''
      "orin.backup.passwordFile = null: name a file"
      "orin.llm-gateway.environmentFile is in the Nix store"
    ];
  };
  # What an attacker of these modules thought of next.
  more = {
    host = imitation {
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
        units = [ "orin-gpux.service" ];
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
    wanted = [
      ''orin.host.user = "grafana": this is the user of a service''
      ''orin.host.sshKeys = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAbc me@laptop": a key of this kind has 68''
      ''orin.host.disk.swap = "nixos": two file systems''
      ''orin.host.modelFolder = "/var/lib/": the folder is given to grafana''
      ''orin.tinygrad.environment = [ "HF_TOKEN" ]: this would lie in the Nix store''
      ''orin.tinygrad.environment.DEV = "CPU": an option sets it''
      ''orin.telemetry.textfileDirectory = "/nix/store''
      "orin.telemetry.exporter.debugfs.port = 81: this service does not run as root"
      ''orin.telemetry.exporter.extraFlags = [ "--listen=0.0.0.0:9401" ]: an option sets one''
      ''orin.telemetry.exporter.webFiles = "tls/key": write the file's name alone''
      ''orin.telemetry.exporter.webFiles."tls/key" = "secrets/tls.key" is no absolute path''
      "orin.telemetry.prometheus.port = 90: this service does not run as root"
      ''orin.telemetry.prometheus.retention = "0d": write a number''
      ''orin.telemetry.prometheus.scrapeInterval = "1h": the alerts need a sample''
      ''orin.telemetry.prometheus.remoteWrite = "https://...": a password in an address''
      "remoteWrite holds a password"
      ''orin.telemetry.prometheus.extraScrapeConfigs = [ "password" ]: this would lie in the Nix store''
      ''orin.telemetry.prometheus.extraScrapeConfigs = "other": this host has a job of that name''
      ''orin.telemetry.prometheus.extraScrapeConfigs = "other": this host has a job of that name''
      "orin.telemetry.alertmanager.port = 93: this service does not run as root"
      ''orin.telemetry.alertmanager.configuration = [ "auth_password" ]: this would lie in the Nix store''
      ''orin.llm-server.metricsKeyFile = "/var/lib/secrets/keys": this is `apiKeyFile` too''
      ''orin.llm-server.device = "gpu": tinygrad has none of this name''
      "orin.llm-server.watchdog = 1: a step over a long prompt"
      ''orin.llm-server.models.main.draftModel = "/var/lib/models/model.gguf": this is `file` too''
      ''orin.llm-server.models.main.extraFlags = [ "--insecure" ]: an option sets one''
      ''orin.llm-gateway.host = "0.0.0.0:4000": write an address alone''
      "orin.llm-gateway.port = 88: this service does not run as root"
      "orin.llm-gateway.firstTokenTimeout = 120: the whole answer has `timeout` = 10 seconds"
      ''orin.llm-gateway.servers.a.models = [ "main" "main" ]: one of these is here twice''
      ''orin.llm-gateway.servers.a.url = "http://orin-1:8000": another entry has this address''
      ''orin.llm-gateway.servers.b.url = "http://orin-1:8000": another entry has this address''
      ''orin.llm-gateway.servers.c.url = "http://...": a password in an address''
      ''orin.upgrade.dates = "every sunday": write it as systemd.time(7) does''
      ''orin.upgrade.flake = "../orins": write a path from the root or an address''
      ''orin.upgrade.units = [ "orin-gpux.service" ]: this host has not all of these''
      "orin.upgrade.timeout = 1200: a server may take 3600 seconds"
      ''orin.backup.repository = "backup/orin": restic would make a folder''
      ''orin.backup.dates = "at night": write it as systemd.time(7) does''
      ''orin.backup.paths = [ "/" ]: write each from the root''
      ''orin.backup.databases = "a/b": the copy is a file of this name''
      ''orin.backup.databases."a/b" = "history.db" is no absolute path''
    ];
  };
  # What a reviewer of the above found to pass.
  yetMore = {
    host = imitation {
      orin.host = {
        modelFolder = "/etc/ssh";
        # The second is right: a file that was read ends with a line's end.
        sshKeys = lib.mkForce [
          "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBvZiBub2JvZHksIGZvciB0aGUgZXhhbXBsZXMh"
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
    wanted = [
      ''orin.host.modelFolder = "/etc/ssh": the folder is given to''
      ''orin.host.sshKeys = "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBvZiBub2JvZHksIGZvciB0aGUgZXhhbXBsZXMh": the key is of another kind''
      ''orin.host.caches."https://cache.example.org "''
      ''orin.telemetry.textfileDirectory = "/etc": the folder is given to the group video''
      ''orin.telemetry.exporter.listenAddress = "300.168.1.5": write an address alone''
      ''orin.telemetry.exporter.extraFlags = [ "--sample-rate 20" ]: a flag and its value''
      ''orin.telemetry.prometheus.retention = "30m1d": write a number''
      ''orin.telemetry.prometheus.scrapeInterval = "5s5s": write a number''
      ''orin.telemetry.prometheus.remoteWrite, password_file = "secrets/metrics": write a file of the board''
      ''orin.telemetry.prometheus.extraScrapeConfigs, key_file = "/nix/store''
      ''services.prometheus.scrapeConfigs = "node": orin.telemetry has a job of that name''
      ''orin.telemetry.alertmanager.configuration, smtp_auth_password_file = "mail": write a file of the board''
      ''orin.llm-server.models.main.file = "/var/lib/models/../model.gguf" holds a space, a quote, a ..''
      ''orin.llm-server.models.main.extraFlags = [ "--ctx-size 4096" ]: a flag and its value''
      "orin.llm-gateway.servers.a.models = [ ]: no request would go to this server"
      ''orin.llm-gateway.servers.b.url = "http://orin-2:8000": another entry has this address''
      ''orin.llm-gateway.servers.c.url = "http://orin-2:8000/": another entry has this address''
      ''orin.upgrade.dates = "25:99": write it as systemd.time(7) does''
      ''orin.cache.listenAddress = "orin-1.local": systemd takes numbers here''
      ''orin.backup.repository = "sftp:nas": restic would make a folder''
      ''orin.backup.dates = "2026-13-01 04:00": write it as systemd.time(7) does''
      ''orin.backup.paths = [ "/srv/../.." ]: write each from the root''
      ''orin.backup.databases."other" = "/var/lib/other/" ends with a slash''
    ];
  };
  # Whose repository's address holds the password.
  passwords = {
    host = imitation {
      orin.backup = {
        enable = true;
        repository = "rest:https://me:hunter2@nas/orin-1";
        passwordFile = "/var/lib/secrets/backup";
      };
    };
    wanted = [ "a password in an address would lie in the Nix store" ];
  };
}
