# On two machines: a prefiller of two ranks, and a decoder of one that checks the path to it, answers
# one prompt and prints that as JSON.
#
#   1: run_prefill.py <== KV over RDMA ==> 2: run_decode.py
#      ends when    <---- port 7401 ----      it has answered
#
# usage: split.sh MODEL PROMPT MAX_TOKENS [FLAG OF BOTH ...]
flags=(--model "$1" --dtype float32 --transport verbs --peer-timeout 60 --verbose "${@:4}")
if [[ $NODE == 1 ]]; then
    python -m tests.rdma_vm.patient run_prefill.py "${flags[@]}" --tp 2 \
        --listen 10.99.0.1:7400 &
    prefiller=$!
    busybox nc -l -p 7401 >/dev/null &
    wait -n
    kill -TERM $prefiller
    wait $prefiller
    [[ $? == 143 ]] # as the README says of SIGTERM
else
    # Files come slowly here: read them while the prefiller does, which loads meanwhile.
    python -c "import disagg.serve.commands"
    until (exec 3<>/dev/tcp/10.99.0.1/7400) 2>/dev/null; do sleep 1; done
    python -m tests.rdma_vm.patient run_decode.py --check 10.99.0.1:7400 --transport verbs || exit
    python -m tests.rdma_vm.patient run_decode.py "${flags[@]}" --prefill 10.99.0.1:7400 \
        --request-timeout 600 --on-failure fail --raw --json --max-tokens "$3" "$2"
    code=$?
    exec 3<>/dev/tcp/10.99.0.1/7401
    exit $code
fi
