"""The console command `forwardscope`, also `python -m service`."""

import contextlib
import logging
import os
import sys

from pydantic import ValidationError
from pydantic_settings import CliApp

from service.app import create_app
from service.server import listen, make_server
from service.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005  # of Python's threads: in the default, 5 ms, the network could have made a token


def main() -> None:
    """Serve until SIGINT or SIGTERM; exit 1 where model or port cannot be served, 2 where a setting is wrong."""
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:])
    except ValidationError as error:
        for problem in error.errors():
            where = "".join(f"{part}: " for part in problem["loc"])
            sys.stderr.write(f"forwardscope: {where}{problem['msg'].removeprefix('Value error, ')}\n")
        sys.exit(2)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")

    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in Settings.model_fields:
            logger.warning("%s is no setting, and changes nothing", name)

    sys.setswitchinterval(SWITCH_SECONDS)

    def stop() -> None:
        server.should_exit = True

    app = create_app(settings, on_failure=stop)
    state = app.state.forwardscope
    try:
        sockets = listen(settings.host, settings.port)
    except OSError as error:
        logger.error("cannot listen at %s, port %d: %s", settings.host, settings.port, error)
        sys.exit(1)
    server = make_server(app)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again when it has ended
        server.run(sockets)
    status = 0
    if state.failure is not None:
        status = 1
    if state.worker.runs_apart:  # torch would abort a process that waits for nothing but is not done
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
