from torch.distributed.elastic.multiprocessing.errors import record

from tigon.train.launch import main

record(main)()
