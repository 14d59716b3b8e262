# The board that builds for the others.
{
  orin.cache = {
    enable = true;
    listenAddress = "0.0.0.0";
    openFirewall = true;
  };
}
