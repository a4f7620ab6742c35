"""The console command `forwardscope`, also `python -m service`."""

import logging
import sys

import uvicorn
from pydantic import ValidationError
from pydantic_settings import CliApp

from service.app import create_app
from service.settings import Settings


def main() -> None:
    """Serve until SIGINT or SIGTERM; exit 1 where the model cannot be served, 2 where a setting is wrong."""
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:])
    except ValidationError as error:
        for problem in error.errors():
            sys.stderr.write(f"forwardscope: {'.'.join(map(str, problem['loc']))}: {problem['msg']}\n")
        sys.exit(2)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def stop() -> None:
        server.should_exit = True

    app = create_app(settings, on_failure=stop)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            log_level=settings.log_level,
            access_log=False,
            timeout_graceful_shutdown=settings.shutdown_grace_seconds,
        )
    )
    server.run()
    if app.state.forwardscope.failure is not None:
        sys.exit(1)


if __name__ == "__main__":
    main()
