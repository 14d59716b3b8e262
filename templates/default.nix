{
  default = {
    path = ./default;
    description = "A NixOS configuration of your own for one Jetson Orin";
  };
  fleet = {
    path = ./fleet;
    description = "Several Jetson Orins and a monitor that keeps their samples, deployed with colmena";
  };
}
