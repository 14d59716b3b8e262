{
  default = {
    path = ./default;
    description = "A NixOS configuration of your own for one Jetson Orin";
  };
  fleet = {
    path = ./fleet;
    description = "Several Jetson Orins, equal but for their names, deployed with colmena";
  };
}
