from calibrate.cli import app

app(prog_name="calibrate")
