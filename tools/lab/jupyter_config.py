"""Settings of JupyterLab as `make lab` starts it: opened notebooks are unchanged, and closed answers look closed."""

from pathlib import Path
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import get_kernel_dict
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

DISPLAY_NAME = get_kernel_dict()["display_name"]
LANGUAGE = IPythonKernel.language_info


class UnchangedOnOpening(AsyncLargeFileManager):
    """Gives JupyterLab each notebook with what it would write into it when the kernel starts.

    JupyterLab writes the kernel's name and the version of Python into a notebook that has others, and from then on the
    notebook counts as changed, although the reader has done nothing.
    """

    async def get(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """A file or a folder as the parent class reads it. A notebook's content is not read for a folder's listing."""
        model = await super().get(*arguments, **options)
        if model["type"] == "notebook" and model["content"] is not None:
            metadata = model["content"]["metadata"]
            if metadata.get("kernelspec", {}).get("name") == "python3":
                metadata["kernelspec"]["display_name"] = DISPLAY_NAME
                metadata["language_info"] = LANGUAGE
        return model


c = get_config()  # type: ignore[name-defined]  # noqa: F821  Jupyter defines it where it reads this file.
c.ServerApp.contents_manager_class = UnchangedOnOpening
# The folder of custom.css is no option of its own: elsewhere it would be the reader's configuration folder.
c.ServerApp.tornado_settings = {"static_custom_path": [str(Path(__file__).parent / "custom")]}
c.LabApp.custom_css = True
