#!/usr/bin/env bash
# Builds the Dockerfile and runs the image: without root, rights or network, its root file system read-only.
# For a Debian machine, as root, that reaches Debian's packages and pip's index, but no registry of images: the base
# image is made of Debian's packages. Needs debootstrap, buildah, podman, runc. Takes some minutes; CI does not run it.
#   tests/deploy/build_image.sh [arguments of `buildah bud`: --build-arg TORCH_INDEX_URL=..., -v FOLDER:FOLDER:ro]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

scratch=$(mktemp -d)
store=(--root "$scratch/store" --runroot "$scratch/run" --storage-driver overlay)
base=localhost/python-base image=localhost/loader-service

finish() {
  buildah "${store[@]}" rm --all >/dev/null 2>&1 || true
  podman "${store[@]}" rm --all --force >/dev/null 2>&1 || true
  umount "$scratch/store/overlay" 2>/dev/null || true
  rm -rf --one-file-system "$scratch"
}
trap finish EXIT

echo '== base image' >&2
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' \
  | awk -v release="$release" '$1 == release { uri = $2 } END { print uri }')
debootstrap --variant=minbase --include=python3,python3-venv,python-is-python3,ca-certificates \
  "$release" "$scratch/base" "$mirror" >"$scratch/debootstrap.log" || { tail "$scratch/debootstrap.log" >&2; exit 1; }
# How this machine reaches packages: whom it trusts, and the settings of pip and apt.
cp /etc/ssl/certs/ca-certificates.crt "$scratch/base/etc/ssl/certs/"
cp --no-clobber /etc/apt/apt.conf.d/* "$scratch/base/etc/apt/apt.conf.d/"
if [[ -e /etc/pip.conf ]]; then cp /etc/pip.conf "$scratch/base/etc/"; fi
container=$(buildah "${store[@]}" from scratch)
buildah "${store[@]}" add --quiet "$container" "$scratch/base" / >&2
buildah "${store[@]}" commit --quiet "$container" "$base" >&2
rm -rf --one-file-system "$scratch/base"

echo '== image' >&2
buildah "${store[@]}" bud --isolation chroot --format docker --build-arg "BASE=$base" --tag "$image" "$@" . >&2
podman "${store[@]}" images "$image"

echo '== demo' >&2
podman "${store[@]}" --runtime runc --cgroup-manager cgroupfs --events-backend file run --rm \
  --network none --read-only --tmpfs /tmp:mode=1777 --cap-drop all --security-opt no-new-privileges --memory 2g \
  --ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" --ulimit nproc=1000:1000 --no-healthcheck \
  "$image" loader-service demo --folder /tmp/demo
