# A board that one can log into and run tinygrad on, and no more.
{
  orin = {
    host.enable = true;
    tinygrad.enable = true;
  };
}
