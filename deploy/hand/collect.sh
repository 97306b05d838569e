#!/bin/sh
# Copies the files of the hand's image into a directory: Python's standard library, the programs nft and tc, the hand,
# and the shared libraries of all of them. The `Dockerfile` calls it: collect.sh DIRECTORY HAND
set -eu
directory=$1
hand=$2
python=$(readlink -f "$(command -v python3)")
library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')

# Large parts that the hand does not import. Some extensions would need large shared libraries.
tar --create --absolute-names --dereference \
    --exclude=__pycache__ --exclude=test --exclude=tests --exclude=idlelib --exclude=lib2to3 --exclude=tkinter \
    --exclude=turtledemo --exclude=ensurepip --exclude=distutils --exclude=pydoc_data --exclude='config-*' \
    --exclude='site-packages' --exclude='dist-packages' --exclude='_ssl.*' --exclude='_hashlib.*' \
    --exclude='_sqlite3.*' --exclude='_tkinter.*' --exclude='*curses*' --exclude='_dbm.*' --exclude='_gdbm.*' \
    --exclude='readline.*' --exclude='_test*' --exclude='_codecs_*' \
    "$library" | tar --extract --directory "$directory"
cp -R "$hand" "$directory$library/hand"

for program in "$python" "$(command -v nft)" "$(command -v tc)"; do
    mkdir -p "$directory$(dirname "$program")"
    cp -L "$program" "$directory$program"
done
if [ "$python" != "$(command -v python3)" ]; then
    ln -s "$python" "$directory$(command -v python3)"
fi
for file in "$python" "$(command -v nft)" "$(command -v tc)" $(find "$directory$library" -name '*.so'); do
    ldd "$file" | awk '$3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }'
done | sort -u | while read -r shared; do
    mkdir -p "$directory$(dirname "$shared")"
    cp -L "$shared" "$directory$shared"
done
mkdir -p "$directory/etc" "$directory/proc" "$directory/tmp"
ldconfig -r "$directory"

# It works, and what it imports is compiled: a hand may run as a user that can write no files.
chroot "$directory" python3 -m hand --help
chroot "$directory" nft --version
chroot "$directory" tc -V
