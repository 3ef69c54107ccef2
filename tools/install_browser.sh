#!/bin/sh
# Install Debian's chromium for the browser tests, where apt is there and may be used without a password.
for browser in chromium chromium-browser google-chrome; do
    command -v "$browser" >/dev/null && exit 0
done
[ -d "/Applications/Google Chrome.app" ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "No chromium or Chrome here, and no apt-get to install it: the browser tests will be skipped." && exit 0
fi
if [ "$(id -u)" -eq 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "No chromium here. Install it for the browser tests: sudo apt-get install chromium" && exit 0
fi
echo "Installing chromium for the browser tests."
$as_root apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
    echo "apt-get could not install chromium, so the browser tests will be skipped."
