#!/bin/sh
# Set up a federation of the four hospitals of the bundled heart disease data: sh hospitals.sh FOLDER [HOST [PORT]]
# FOLDER/server goes to the server, FOLDER/NAME to the node NAME, and FOLDER/offline/ca nowhere: it makes certificates.
# With your own tables, replace the line that writes rows.csv.
set -eu
place=${1:?"usage: sh hospitals.sh FOLDER [HOST [PORT]]"}
host=${2:-server}
port=${3:-8765}
rows='
import sys, polars
from coterie.data import bundled
table = polars.read_csv(bundled.path("heart_disease"), infer_schema=False)
table.filter(polars.col("hospital") == sys.argv[1]).drop("hospital").write_csv(sys.argv[2])
'

coterie federate init "$place/server" --client hospital --target sick --host "$host" --port "$port"
for name in cleveland hungarian switzerland va; do
    coterie federate join "$place/$name" "$name" # makes the key, which stays in this folder
    coterie federate sign "$place/server" "$place/$name/$name.csr" --clients "$name"
    for file in node.crt ca.crt node.toml; do
        cp "$place/server/nodes/$name/$file" "$place/$name/$file"
    done
    python -c "$rows" "$name" "$place/$name/rows.csv"
    coterie federate policy "$place/$name" --data "$place/$name/rows.csv" --client hospital --target sick >/dev/null
done
mkdir -m 700 "$place/offline"
mv "$place/server/ca" "$place/offline/ca"
echo "$place: a server and four nodes. Keep $place/offline where no network reaches it."
